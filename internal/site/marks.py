"""What a mark of a page is: an expression, and the text that it makes. It needs no other package."""

import re

MARK = re.compile(r"(?P<start><!--= (?P<expression>.+?) -->)(?P<text>.*?)(?P<end><!--/-->)", re.DOTALL)
