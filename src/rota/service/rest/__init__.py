"""REST API: application, authentication, rights, and the routes."""
