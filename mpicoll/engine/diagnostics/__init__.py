"""Where every rank stands, what it did last, and what follows when ranks wait for each other or end."""
