"""The console command `sparseattn`: a file a subcommand, joined in `app.py`. It may use everything."""
