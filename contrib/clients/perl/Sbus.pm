# A client of the message bus sbus, to be copied.  It needs Perl alone.
#
#     my $bus = Sbus->new;
#     $bus->subscribe('sensors/');
#     $bus->publish('sensors/1', '21.5');
#     while (my $message = $bus->receive) {
#         print "$message->{key} $message->{payload}\n";
#     }
#
# A call that fails dies with a line of text; Sbus::CLOSED is the one of a bus
# that has closed.  At the end receive returns undef.  Timeouts are seconds.
# Keys, patterns and payloads are bytes: encode text before.
package Sbus;
use v5.14;
use warnings;
use Errno qw(EAGAIN ECONNRESET EINTR EPIPE);
use Socket qw(:DEFAULT MSG_DONTWAIT MSG_NOSIGNAL SOCK_SEQPACKET);
use Time::HiRes qw(clock_gettime CLOCK_MONOTONIC);

use constant PACKET_MAX => 409_600;
use constant WHOAMI     => '!/cred/whoami';
use constant CLOSED     => "the bus has closed\n";

# Any server accepts these, if they are short.  A segment ! elsewhere would have
# it disconnect this client [REQUEST-3].
use constant REPLY_KEY =>
    qr{(?:!/cred/[0-9]+/[0-9]+/[0-9]+/){1,12}[0-9A-Za-z]+/[0-9A-Za-z]+};

# ---- Where the bus is [ADDR-1]

sub default_address {
    return $ENV{SBUS_ADDRESS} if length($ENV{SBUS_ADDRESS} // '');
    return '/run/sbus.socket' if $< == 0;

    for my $directory ($ENV{XDG_RUNTIME_DIR} // '', "/run/user/$<") {
        next unless $directory =~ m{^/} && -d $directory;
        my ($mode, $owner) = (stat _)[2, 4];
        return "$directory/sbus.socket" if $owner == $< && !($mode & 022);
    }

    # Anybody could have made this one, and so it must be no link
    my $directory = "/tmp/sbus-$<";
    my ($mode, $owner) = (lstat $directory)[2, 4];
    die "no bus: there is no $directory\n" unless defined $mode;
    die "$directory is not yours alone\n"
        unless -d _ && $owner == $< && !($mode & 077);
    return "$directory/sbus.socket";
}

# Connect to an address, or to the default one.
sub new {
    my ($class, $address) = @_;
    my $name = $address // default_address();
    if ($name =~ m{^/dev/unix/abstract/(00[0-9a-f]*)\z}i) {
        $name = pack 'a108', pack 'H*', $1;    # NUL bytes fill it up [ADDR-4]
    }
    socket my $socket, AF_UNIX, SOCK_SEQPACKET, 0 or die "socket: $!\n";

    # The kernel doubles it, and so the largest packet fits [CLIENT-3]
    setsockopt $socket, SOL_SOCKET, SO_SNDBUF, PACKET_MAX / 2 + 32;
    connect $socket, pack_sockaddr_un($name) or die "no bus: $!\n";
    return bless {
        socket     => $socket,
        kept       => [],    # what came before an answer
        reply_keys => '',    # the answers to all requests begin so
        requests   => 0,
    }, $class;
}

sub close {
    my ($self) = @_;
    shutdown $self->{socket}, 2;
    CORE::close $self->{socket};
}

# ---- What is sent

# Send a packet by one call, which waits while the bus is busy [CLIENT-3].
sub _send {
    my ($self, $kind, $key, $rest) = @_;
    my $packet = "$kind $key$rest";
    die "a key or pattern has no NUL byte\n" if index($key, "\0") >= 0;
    die "a key or payload is bytes: encode it\n"
        unless utf8::downgrade($packet, 1);
    die "a packet is too large\n" if length $packet > PACKET_MAX;

    until (defined send $self->{socket}, $packet, MSG_NOSIGNAL) {
        # What came before can still be received [CLIENT-6]
        die CLOSED            if $! == EPIPE || $! == ECONNRESET;
        die "cannot send: $!\n" if $! != EINTR;
    }
}

sub subscribe {
    my ($self, $pattern) = @_;
    $self->_send('SUB', $pattern, '');
}

sub unsubscribe {
    my ($self, $pattern) = @_;
    $self->_send('UNSUB', $pattern, '');
}

sub publish {
    my ($self, $key, $payload) = @_;
    $self->_send('MSG', $key, "\0" . ($payload // ''));
}

# ---- What is received

sub _time { clock_gettime(CLOCK_MONOTONIC) }

# Wait until something can be received; die if a time comes first.
sub _wait {
    my ($self, $end) = @_;
    my $left = $end - _time();
    vec(my $ready = '', fileno $self->{socket}, 1) = 1;
    select($ready, undef, undef, $left > 0 ? $left : 0)
        or die "nothing came in time\n";
}

# Return the next packet of the socket as a message, or undef at the end.
sub _read {
    my ($self, $end) = @_;
    my $packet;
    while (1) {
        $self->_wait($end) if defined $end;

        # A packet that fills one byte more was cut [CLIENT-5]
        my $flags = defined $end ? MSG_DONTWAIT : 0;
        last if defined recv $self->{socket}, $packet, PACKET_MAX + 1, $flags;

        # A reset comes once, before the last packets [CLIENT-6]
        die "cannot receive: $!\n"
            unless $! == ECONNRESET || $! == EINTR || $! == EAGAIN;
    }
    return undef if $packet eq '';
    die "a packet was too large, and is lost\n" if length $packet > PACKET_MAX;
    my ($kind, $key, $payload) = $packet =~ /\A(\S+) ([^\0]*)\0(.*)\z/s;
    return { control => $kind eq 'CMSG', key => $key, payload => $payload };
}

# Whether a message answers a request, even one that nobody waits for.
sub _is_answer {
    my ($self, $message) = @_;
    my $start = $self->{reply_keys};
    return $start ne '' && index($message->{key}, $start) == 0;
}

# Return the next message, or undef if the bus has closed.
sub receive {
    my ($self, $timeout) = @_;
    return shift @{ $self->{kept} } if @{ $self->{kept} };

    my $end = defined $timeout ? _time() + $timeout : undef;
    my $message;
    do { $message = $self->_read($end) }
        while $message && $self->_is_answer($message);    # it comes too late
    return $message;
}

# Return the answer under a key, and keep what comes before [CLIENT-8].
sub _await {
    my ($self, $is_control, $key, $end) = @_;
    while (my $message = $self->_read($end)) {
        my $is_same = $message->{key} =~ m{\A\Q$key\E(?:/failed)?\z};
        return $message if $is_same && $message->{control} == $is_control;
        push @{ $self->{kept} }, $message unless $self->_is_answer($message);
    }
    die CLOSED;
}

# Return who this client is.  When the answer comes, the server has done all
# that was sent before [PKT-5].
sub whoami {
    my ($self, $timeout) = @_;
    my $end = defined $timeout ? _time() + $timeout : undef;

    # If the bus has closed, what it sent before is still to be kept
    my $is_sent = eval { $self->_send('CMSG', WHOAMI, ''); 1 };
    die $@ unless $is_sent || $@ eq CLOSED;
    return $self->_await(1, WHOAMI, $end)->{payload};
}

# ---- Requests, of which the server knows nothing

# Ask the clients that have subscribed to a key; return the first answer.
sub request {
    my ($self, $key, $question, $timeout) = @_;
    my $end = _time() + ($timeout // 5);
    if ($self->{reply_keys} eq '') {
        open my $random, '<:raw', '/dev/urandom' or die "/dev/urandom: $!\n";
        read $random, my $secret, 16;    # so that nobody can guess the keys
        my $own  = $self->whoami($timeout // 5);
        my $keys = join '/', $own, unpack('H*', $secret), '';
        $self->subscribe($keys);
        $self->{reply_keys} = $keys;
    }

    my $reply_key = $self->{reply_keys} . ++$self->{requests};
    $self->publish($key, "$reply_key\0$question");
    my $answer = $self->_await(0, $reply_key, $end);
    return $answer->{payload} if $answer->{key} eq $reply_key;
    die "$key failed: $answer->{payload}\n";
}

# Answer a message whose payload is a key for the answer, NUL, and a question.
sub reply {
    my ($self, $asked, $answer) = @_;
    substr($asked->{payload}, 0, 4000) =~ m{\A(${\REPLY_KEY})\0}
        or die "this message is no request\n";
    $self->publish($1, $answer);
}

1;
