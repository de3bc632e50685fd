"""How many workers train one model, and with which plan: the plan language, its cost model and its search."""
