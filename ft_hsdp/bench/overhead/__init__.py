"""`bench overhead`: what fault tolerance costs while nothing fails."""
