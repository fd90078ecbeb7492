"""The data of an audit and its renderings. Pure functions."""
