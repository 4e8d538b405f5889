"""The program that makes a recipe: which neurons go where, and the routers. Needs the extra `carve`."""
