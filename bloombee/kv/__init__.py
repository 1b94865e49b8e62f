"""Page pool, page tables and attention over them; nobody else knows the layout."""
