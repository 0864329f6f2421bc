"""Tests of what --live shows."""
