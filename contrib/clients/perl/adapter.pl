# The adapter of Sbus.pm for the conformance kit; spec/README.md has its form:
# perl adapter.pl ADDRESS
use v5.14;
use warnings;
use FindBin;
use lib $FindBin::Bin;
use Sbus;

# Do what a command says, and return the answer.
sub perform {
    my ($bus, $word, $key, $text) = @_;
    state $last;
    if ($word eq 'receive') {
        $last = $bus->receive // die Sbus::CLOSED;
        my $kind = $last->{control} ? 'control' : 'ok';
        return join ' ', $kind, map { unpack 'H*', $_ } @$last{qw(key payload)};
    }
    return 'ok - ' . unpack 'H*', $bus->whoami if $word eq 'whoami';
    return 'ok - ' . unpack 'H*', $bus->request($key, $text)
        if $word eq 'request';
    $bus->$word($word eq 'reply' ? $last : $key, $text);
    return 'ok';
}

$| = 1;
my $bus = Sbus->new($ARGV[0]);
while (my $line = <STDIN>) {
    my ($word, @texts) = split ' ', $line;
    my @decoded = map { $_ eq '-' ? '' : pack 'H*', $_ } @texts;
    my $answer = eval { perform($bus, $word, @decoded) };
    chomp(my $error = $@);
    say $answer // ($@ eq Sbus::CLOSED ? 'closed' : "error $error");
}
$bus->close;
