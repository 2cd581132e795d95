"""The command line `longctx`; what it does lives in longctx_patch, so that scripts can do it too."""
