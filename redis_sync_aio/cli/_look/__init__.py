"""The commands that look at locks from outside, and the one that releases what got stuck."""
