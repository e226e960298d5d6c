"""Settings, files and the console, which every other package may use. Imports none of them."""
