"""The command line `longctx`. What it does lives in longctx_patch, for scripts to use too."""
