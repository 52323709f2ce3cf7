"""The commands that look at locks from outside, and those that release a stuck lock or forget a job."""
