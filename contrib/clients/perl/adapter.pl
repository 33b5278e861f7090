# The adapter of Sbus.pm for the conformance kit; spec/README.md has its form:
# perl adapter.pl ADDRESS
use v5.14;
use warnings;
use FindBin;
use lib $FindBin::Bin;
use Sbus;

# Do what a command says, and return the answer.
sub perform {
    my ($bus, $word, @texts) = @_;
    state $message;
    if ($word eq 'receive') {
        $message = $bus->receive // die Sbus::CLOSED;
        my $kind = $message->{control} ? 'control' : 'message';
        return join ' ', $kind, map { unpack 'H*', $_ } @$message{qw(key payload)};
    }
    return 'credentials ' . unpack 'H*', $bus->whoami if $word eq 'whoami';
    return 'answer ' . unpack 'H*', $bus->request(@texts) if $word eq 'request';
    $bus->$word($word eq 'reply' ? ($message, @texts) : @texts);
    return 'ok';
}

$| = 1;
my $bus = Sbus->new($ARGV[0] || undef);
while (my $line = <STDIN>) {
    my ($word, @texts) = split ' ', $line;
    my @decoded = map { $_ eq '-' ? '' : pack 'H*', $_ } @texts;
    my $answer = eval { perform($bus, $word, @decoded) };
    chomp(my $error = $@);
    say $answer // ($@ eq Sbus::CLOSED ? 'closed' : "error $error");
}
