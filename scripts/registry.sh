# Sourced: hands pip's settings to uv, which does not read them by itself. A uv variable that is set already wins.
#
# find-links   directories of wheels, one of which may hold torch's CPU build
# index-url    a mirror of the registry
# cert         the certificates to trust

# The merged configuration: `pip config get` sees one file only.
_pip_settings=$("${python:-python3}" -m pip config list 2>/dev/null || true)

_pip_setting() { # $1: the setting's name, from the variable PIP_<NAME> or else from pip's configuration
    local variable
    variable="PIP_$(echo "$1" | tr 'a-z-' 'A-Z_')"
    echo "${!variable:-$(sed -n "s/^\(global\|install\)\.$1='\(.*\)'$/\2/p" <<<"$_pip_settings" | tail -n 1)}"
}

_export_unless_set() { # $1: the variable that uv reads, $2: its value, if any
    if [ -z "${!1:-}" ] && [ -n "$2" ]; then
        export "$1=$2"
    fi
}

_export_unless_set UV_FIND_LINKS "$(_pip_setting find-links | tr -s '[:space:]' ',' | sed 's/,$//')"
_export_unless_set UV_DEFAULT_INDEX "${UV_INDEX_URL:-$(_pip_setting index-url)}"
_export_unless_set SSL_CERT_FILE "$(_pip_setting cert)"
