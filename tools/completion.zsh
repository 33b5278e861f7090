#compdef sbus
# Completion of sbus for zsh: sbus completion zsh >DIRECTORY_OF_FPATH/_sbus
local before=("${(@Q)words[2,CURRENT-1]}")
compadd -- $($words[1] completion words $before 2>/dev/null) || _files
