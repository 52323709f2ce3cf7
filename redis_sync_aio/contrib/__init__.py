"""Integrations with other libraries. Each module needs a package of its own, named by an extra."""
