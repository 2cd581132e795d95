"""The command line `longctx`. The work is done in longctx_patch, which scripts can use too."""
