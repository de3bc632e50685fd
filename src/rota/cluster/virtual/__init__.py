"""Virtual clusters on buddy cells: what each tenant owns, and where that lies."""
