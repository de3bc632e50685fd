"""Documents of the REST API, each declared once: OpenAPI, the views, both clients and the types of the UI follow."""
