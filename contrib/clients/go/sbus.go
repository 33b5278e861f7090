// Package sbus is a client of the message bus sbus, to be copied.  It needs
// the standard library alone.
//
//	bus, err := sbus.Dial("")
//	err = bus.Subscribe("sensors/")
//	err = bus.Publish("sensors/1", []byte("21.5"))
//	message, err := bus.Receive() // io.EOF: the bus has closed
//
// Any goroutine may publish; one at a time may receive, or wait for answers.
// A deadline of the connection is one of Receive; Request sets its own.
package sbus

import (
	"bytes"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"regexp"
	"strings"
	"syscall"
	"time"
)

const packetMax = 409600
const whoami = "!/cred/whoami"
const abstract = "/dev/unix/abstract/"

// Message is what a client has published, or if Control what the server says.
type Message struct {
	Control bool
	Key     string
	Payload []byte
}

// Client is a connection to a bus.
type Client struct {
	*net.UnixConn
	kept      []Message // what came before an answer [CLIENT-8]
	replyKeys string    // the answers to all requests begin so
	requests  int
	buffer    [packetMax + 1]byte // a packet that fills it was cut [CLIENT-5]
}

// ---- Where the bus is [ADDR-1]

// isOurs says whether a directory is this user's, and lets nobody else do what
// the bits of its mode stand for.
func isOurs(info os.FileInfo, err error, bits os.FileMode) bool {
	return err == nil && info.IsDir() && info.Mode()&bits == 0 &&
		int(info.Sys().(*syscall.Stat_t).Uid) == os.Getuid()
}

// defaultAddress returns where a bus is by default, or nothing.
func defaultAddress() string {
	if address := os.Getenv("SBUS_ADDRESS"); address != "" {
		return address
	}
	if os.Getuid() == 0 {
		return "/run/sbus.socket"
	}

	user := fmt.Sprintf("/run/user/%d", os.Getuid())
	for _, directory := range []string{os.Getenv("XDG_RUNTIME_DIR"), user} {
		info, err := os.Stat(directory)
		if strings.HasPrefix(directory, "/") && isOurs(info, err, 022) {
			return directory + "/sbus.socket"
		}
	}

	// Anybody could have made this one, and so it must be no link
	directory := fmt.Sprintf("/tmp/sbus-%d", os.Getuid())
	if info, err := os.Lstat(directory); isOurs(info, err, 077) {
		return directory + "/sbus.socket"
	}
	return ""
}

// socketName returns an address as package net wants it: with @ for the first
// byte of an abstract name.  Write "./@x" for a path that begins with @.
func socketName(address string) (string, error) {
	if address == "" {
		return "", errors.New("sbus: no directory for a bus is yours alone")
	}
	if !strings.HasPrefix(address, abstract) {
		return address, nil
	}
	name, err := hex.DecodeString(strings.TrimPrefix(address, abstract))
	if err != nil || len(name) == 0 || len(name) > 108 || name[0] != 0 {
		return "", fmt.Errorf("sbus: %q is no abstract name", address)
	}
	zeros := strings.Repeat("\x00", 108-len(name)) // [ADDR-4]
	return "@" + string(name[1:]) + zeros, nil
}

// Dial connects to an address, or to the default one if it is empty.
func Dial(address string) (*Client, error) {
	if address == "" {
		address = defaultAddress()
	}
	name, err := socketName(address)
	if err != nil {
		return nil, err
	}

	place := &net.UnixAddr{Name: name, Net: "unixpacket"}
	for {
		conn, err := net.DialUnix("unixpacket", nil, place)
		if err == nil {
			// The kernel doubles it, and so the largest packet fits
			err = conn.SetWriteBuffer(packetMax/2 + 32)
			return &Client{UnixConn: conn}, err
		}
		if !errors.Is(err, syscall.EAGAIN) {
			return nil, err
		}
		time.Sleep(10 * time.Millisecond) // as many connect at once
	}
}

// ---- What is sent

// send sends a packet by one call, which waits for a busy bus [CLIENT-3].
func (c *Client) send(kind, key string, rest ...[]byte) error {
	packet := append([]byte(kind+key), bytes.Join(rest, nil)...)
	if strings.Contains(key, "\x00") || len(packet) > packetMax {
		return errors.New("sbus: a packet is too large, or its key has NUL")
	}
	_, err := c.Write(packet)
	if errors.Is(err, syscall.EPIPE) || errors.Is(err, syscall.ECONNRESET) {
		return io.EOF // what came before can still be received [CLIENT-6]
	}
	return err
}

// Subscribe asks for the messages whose keys a pattern selects.
func (c *Client) Subscribe(pattern string) error {
	return c.send("SUB ", pattern)
}

// Unsubscribe takes one such subscription back.
func (c *Client) Unsubscribe(pattern string) error {
	return c.send("UNSUB ", pattern)
}

// Publish sends a message.
func (c *Client) Publish(key string, payload []byte) error {
	return c.send("MSG ", key, []byte{0}, payload)
}

// ---- What is received

// read returns the next packet of the socket as a message.
func (c *Client) read() (Message, error) {
	packet := c.buffer[:]
	size, err := c.Read(packet)
	for errors.Is(err, syscall.ECONNRESET) {
		size, err = c.Read(packet) // it comes once, before the last packets
	}
	if err != nil {
		return Message{}, err
	}
	if size > packetMax {
		return Message{}, errors.New("sbus: a packet was too large")
	}
	head, payload, _ := bytes.Cut(packet[:size], []byte{0})
	kind, key, _ := strings.Cut(string(head), " ")
	payload = append([]byte(nil), payload...) // as the buffer is used again
	return Message{kind == "CMSG", key, payload}, nil
}

// isAnswer says whether a message answers a request, even one that nobody
// waits for.
func (c *Client) isAnswer(message Message) bool {
	return c.replyKeys != "" && strings.HasPrefix(message.Key, c.replyKeys)
}

// Receive returns the next message, or io.EOF if the bus has closed.
func (c *Client) Receive() (Message, error) {
	if len(c.kept) > 0 {
		message := c.kept[0]
		c.kept = c.kept[1:]
		return message, nil
	}
	for {
		message, err := c.read()
		if err != nil || !c.isAnswer(message) { // which comes too late
			return message, err
		}
	}
}

// await returns the answer under a key, and keeps what comes before it
// [CLIENT-8].
func (c *Client) await(control bool, key string) (Message, error) {
	for {
		message, err := c.read()
		isSame := strings.TrimSuffix(message.Key, "/failed") == key
		if err != nil || isSame && message.Control == control {
			return message, err
		}
		if !c.isAnswer(message) {
			c.kept = append(c.kept, message)
		}
	}
}

// Whoami returns who this client is.  When the answer comes, the server has
// done all that was sent before [PKT-5].
func (c *Client) Whoami() (string, error) {
	err := c.send("CMSG ", whoami)
	if err != nil && err != io.EOF { // then what it sent before is to be kept
		return "", err
	}
	answer, err := c.await(true, whoami)
	return string(answer.Payload), err
}

// ---- Requests, of which the server knows nothing

// Request asks the clients that have subscribed to a key, and returns the
// first answer.
func (c *Client) Request(
	key string, question []byte, timeout time.Duration,
) ([]byte, error) {
	c.SetReadDeadline(time.Now().Add(timeout))
	defer c.SetReadDeadline(time.Time{})
	if c.replyKeys == "" { // which nobody is to guess
		own, err := c.Whoami()
		if err != nil {
			return nil, err
		}
		secret := make([]byte, 16)
		rand.Read(secret)
		c.replyKeys = fmt.Sprintf("%s/%x/", own, secret)
		if err = c.Subscribe(c.replyKeys); err != nil {
			return nil, err
		}
	}

	c.requests++
	replyKey := fmt.Sprint(c.replyKeys, c.requests)
	err := c.send("MSG ", key, []byte{0}, []byte(replyKey), []byte{0}, question)
	if err != nil {
		return nil, err
	}
	answer, err := c.await(false, replyKey)
	if err == nil && answer.Key != replyKey {
		err = fmt.Errorf("sbus: %s failed: %s", key, answer.Payload)
	}
	return answer.Payload, err
}

// replyForm is that of keys for answers, which any server accepts if they are
// short.  A segment ! elsewhere would have it disconnect this client
// [REQUEST-3].
var replyForm = regexp.MustCompile(
	`^(!/cred/[0-9]+/[0-9]+/[0-9]+/){1,12}[0-9A-Za-z]+/[0-9A-Za-z]+$`)

// Reply answers a message whose payload is a key for the answer, NUL, and a
// question.
func (c *Client) Reply(asked Message, answer []byte) error {
	key, _, isRequest := bytes.Cut(asked.Payload, []byte{0})
	if !isRequest || len(key) > 4000 || !replyForm.Match(key) {
		return errors.New("sbus: the message is no request")
	}
	return c.Publish(string(key), answer)
}
