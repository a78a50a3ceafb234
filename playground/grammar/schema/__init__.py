"""JSON Schemas: read, and reduced to what the grammar engine enforces."""
