"""Messages and stubs of ``proto/greenroom/v1``, made by ``make proto``. Nothing here is written by hand."""
