// The adapter of sbus.js for the conformance kit; spec/README.md has its form:
// node adapter.js ADDRESS
'use strict'
const { createInterface } = require('node:readline')
const { Sbus } = require('./sbus.js')

const encode = text => Buffer.from(text, 'latin1').toString('hex')
let asked // the message that was received last

// Do what a command says, and give the answer.
async function perform (bus, word, key, text) {
  if (word === 'receive') {
    asked = await bus.receive()
    if (!asked) return 'closed'
    const kind = asked.isControl ? 'control' : 'message'
    return `${kind} ${encode(asked.key)} ${encode(asked.payload)}`
  }
  if (word === 'whoami') return `credentials ${encode(await bus.whoami())}`
  if (word === 'request') {
    return `answer ${encode(await bus.request(key, text))}`
  }
  if (word === 'reply') await bus.reply(asked, Buffer.from(key, 'latin1'))
  else await bus[word](key, text)
  return 'ok'
}

async function main () {
  const bus = await Sbus.connect(process.argv[2] || undefined)
  for await (const line of createInterface({ input: process.stdin })) {
    const [word, key = '', text = ''] = line.split(' ')
    const decoded = Buffer.from(key, 'hex').toString('latin1')
    const answer = perform(bus, word, decoded, Buffer.from(text, 'hex'))
    console.log(await answer.catch(error =>
      error.code === 'EPIPE' ? 'closed' : `error ${error.message}`))
  }
}

main().catch(error => { console.error(error.message); process.exit(1) })
