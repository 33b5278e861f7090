// The adapter of sbus.js for the conformance kit; spec/README.md has its form:
// node adapter.js ADDRESS
'use strict'
const { createInterface } = require('node:readline')
const { Sbus } = require('./sbus.js')

const encode = text => Buffer.from(text, 'latin1').toString('hex')
let last // the message that was received last

// Do what a command says, and give the answer.
async function perform (bus, word, key, text) {
  if (word === 'receive') {
    last = await bus.receive()
    if (!last) return 'closed'
    const kind = last.isControl ? 'control' : 'ok'
    return `${kind} ${encode(last.key)} ${encode(last.payload)}`
  }
  if (word === 'whoami') return `ok - ${encode(await bus.whoami())}`
  if (word === 'request') {
    return `ok - ${encode(await bus.request(key, text))}`
  }
  await bus[word](word === 'reply' ? last : key, text)
  return 'ok'
}

async function main () {
  const bus = await Sbus.connect(process.argv[2])
  for await (const line of createInterface({ input: process.stdin })) {
    const [word, key, text] = line.split(' ')
    const decoded = Buffer.from(key, 'hex').toString('latin1')
    const answer = perform(bus, word, decoded, Buffer.from(text, 'hex'))
    console.log(await answer.catch(error =>
      error.code === 'EPIPE' ? 'closed' : `error ${error.message}`))
  }
  await bus.close()
}

main().catch(error => { console.error(error.message); process.exit(1) })
