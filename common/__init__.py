"""What every other package may use: settings, files, the console. Imports none of them."""
