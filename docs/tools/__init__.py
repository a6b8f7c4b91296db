"""What makes the site, its pictures and its tables: `make docs` builds the site into site/."""
