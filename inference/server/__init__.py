"""A trained model for people and programs: a page, and an API in OpenAI's form."""
