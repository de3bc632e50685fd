"""Tests of Rota; the folders mirror the package."""
