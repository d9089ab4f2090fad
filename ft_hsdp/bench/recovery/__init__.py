"""`bench recovery`: what a lost replica costs the others, and how soon it is back."""
