"""Print the errors of a pyright JSON report, one line each."""

import json
import sys
from pathlib import Path

report = json.loads(Path(sys.argv[1]).read_text())
for item in report.get("generalDiagnostics", []):
    if item["severity"] == "error":
        start = item["range"]["start"]
        message = item["message"].splitlines()[0]
        print(f"{item['file']}:{start['line'] + 1}:{start['character'] + 1}: {message} ({item.get('rule', '')})")
print(f"{report['summary']['errorCount']} errors")
