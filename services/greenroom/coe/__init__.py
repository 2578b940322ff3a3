"""Collaboration of experts (CoE): pipelines of whole models, of which each request needs one after another."""
