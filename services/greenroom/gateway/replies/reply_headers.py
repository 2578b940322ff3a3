"""Headers that are greenroom's own, in replies over HTTP and in the initial metadata of RPCs."""

REPLY_ID_HEADER = "Greenroom-Request-Id"
HINTS_HEADER = "Greenroom-Without-Effect"
