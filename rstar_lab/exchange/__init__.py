"""Files of other tools: importers, exports, ATIF and the MCP server. Nothing of the core imports this package."""
