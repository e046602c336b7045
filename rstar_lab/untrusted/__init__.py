"""Everything that comes from others: files, answers of servers, results of graders, texts that are shown, recipes of runs.

`files` reads JSON, text, YAML and archives, `parquet` reads tables, `text` makes texts safe to show, `recipes` holds the recipes of
run folders. Every reader raises `DataError`, which names the file or the server and the place in it.
"""
