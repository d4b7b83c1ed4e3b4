"""credits."""
