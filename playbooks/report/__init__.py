"""The verdict as text, JSON, markdown and one self-contained HTML file."""
