# Completion of sbus for fish:
# sbus completion fish >~/.config/fish/completions/sbus.fish
function __sbus
    set -l words (commandline -opc)
    $words[1] completion words $words[2..] 2>/dev/null
end
complete -c sbus -a '(__sbus)'
