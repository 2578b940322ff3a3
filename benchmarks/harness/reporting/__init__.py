"""From values to what a benchmark says: statistics, aims, tables, pictures, progress, JSON."""
