"""Files of other tools: importers, exports and the MCP server. Nothing of the core imports this package."""
