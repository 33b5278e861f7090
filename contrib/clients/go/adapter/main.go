// The adapter of the client in Go for the conformance kit; spec/README.md has
// its form: go build -o ADAPTER ./adapter
package main

import (
	"bufio"
	"encoding/hex"
	"fmt"
	"io"
	"os"
	"sbus"
	"strings"
)

// Whether the server itself has sent what was received, and has closed
var kinds = map[bool]string{false: "ok", true: "control"}
var failures = map[bool]string{false: "error", true: "closed"}

func main() {
	var last sbus.Message
	bus, err := sbus.Dial(append(os.Args, "")[1])
	if err != nil {
		panic(err)
	}
	lines := bufio.NewScanner(os.Stdin)
	for lines.Buffer(nil, 1<<22); lines.Scan(); {
		words := strings.Fields(lines.Text())
		bytes, _ := hex.DecodeString(words[1]) // "-" gives none
		text, _ := hex.DecodeString(words[2])
		key := string(bytes)
		map[string]func(){
			"subscribe":   func() { err = bus.Subscribe(key) },
			"unsubscribe": func() { err = bus.Unsubscribe(key) },
			"publish":     func() { err = bus.Publish(key, text) },
			"request":     func() { text, err = bus.Request(key, text, 5e9) },
			"reply":       func() { err = bus.Reply(last, text) },
			"whoami":      func() { key, err = bus.Whoami(); text = []byte(key) },
			"receive":     func() { last, err = bus.Receive(); text = last.Payload },
		}[words[0]]()
		if err != nil {
			fmt.Println(failures[err == io.EOF], err)
		} else {
			fmt.Printf("%s %x %x\n", kinds[last.Control], last.Key, text)
		}
	}
}
