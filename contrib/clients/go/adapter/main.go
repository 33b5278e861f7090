// The adapter of the client in Go for the conformance kit; spec/README.md has
// its form: go build -o ADAPTER ./adapter
package main

import (
	"bufio"
	"encoding/hex"
	"fmt"
	"io"
	"log"
	"os"
	"sbus"
	"strings"
	"time"
)

var kinds = map[bool]string{false: "message", true: "control"}

func main() {
	var asked sbus.Message
	bus, err := sbus.Dial(os.Args[1])
	lines := bufio.NewScanner(os.Stdin)
	for lines.Buffer(nil, 1<<22); bus != nil && lines.Scan(); {
		words := append(strings.Fields(lines.Text()), "", "")
		bytes, _ := hex.DecodeString(words[1]) // "-" gives none
		text, _ := hex.DecodeString(words[2])
		key, answer := string(bytes), "ok"
		switch words[0] {
		case "receive":
			asked, err = bus.Receive()
			answer = fmt.Sprintf("%s %x %x", kinds[asked.Control], asked.Key,
				asked.Payload)
		case "whoami":
			answer, err = bus.Whoami()
			answer = fmt.Sprintf("credentials %x", answer)
		case "request":
			text, err = bus.Request(key, text, 5*time.Second)
			answer = fmt.Sprintf("answer %x", text)
		case "reply":
			err = bus.Reply(asked, bytes)
		case "publish":
			err = bus.Publish(key, text)
		case "subscribe":
			err = bus.Subscribe(key)
		case "unsubscribe":
			err = bus.Unsubscribe(key)
		default:
			err = bus.Close()
		}
		if err == io.EOF {
			answer = "closed"
		} else if err != nil {
			answer = "error " + err.Error()
		}
		fmt.Println(answer)
	}
	if bus == nil {
		log.Fatal(err)
	}
}
