"""``python -m redis_sync_aio`` is ``redis-sync-aio``."""

from .cli import main

main()
