// A client of the message bus sbus, to be copied.  Node has no SEQPACKET
// sockets, so the package koffi makes one by the C library; Node's own fs
// sends and receives.
//
//     const bus = await Sbus.connect()
//     await bus.subscribe('sensors/')
//     await bus.publish('sensors/1', '21.5')
//     for await (const { key, payload } of bus) console.log(key, payload)
//
// A call that fails rejects with an Error; its code is EPIPE if the bus has
// closed.  At the end the loop ends, and receive gives undefined.  Payloads
// are Buffers; a character of a key is a byte (latin1).  A call that waits
// takes one of the four threads of UV_THREADPOOL_SIZE.
'use strict'
const { randomBytes } = require('node:crypto')
const fs = require('node:fs')
const { promisify } = require('node:util')
const koffi = require('koffi')

const libc = koffi.load(null)
const socket = libc.func('int socket(int, int, int)')
const connect = libc.func('int connect(int, void *, int)')
const setsockopt = libc.func('int setsockopt(int, int, int, int *, int)')
const shutdown = libc.func('int shutdown(int, int)')
const read = promisify(fs.read)
const write = promisify(fs.write)

const [AF_UNIX, SOCK_SEQPACKET, SOCK_CLOEXEC] = [1, 5, 0o2000000]
const [SOL_SOCKET, SO_SNDBUF] = [1, 7]
const PACKET_MAX = 409600
const WHOAMI = '!/cred/whoami'
const ABSTRACT = '/dev/unix/abstract/'
// Any server accepts these, if they are short.  A segment ! elsewhere would
// have it disconnect this client [REQUEST-3].
const REPLY_KEY = /^(!\/cred\/\d+\/\d+\/\d+\/){1,12}[^\W_]+\/[^\W_]+(?=\0)/

function failure (code, text) {
  return Object.assign(new Error(text), { code })
}

// ---- Where the bus is [ADDR-1]

// Whether a directory is this user's, and its mode has none of these bits.
function isOurs (status, bits) {
  const isOwn = status?.isDirectory() && status.uid === process.getuid()
  return isOwn && !(status.mode & bits)
}

function defaultAddress () {
  const uid = process.getuid()
  if (process.env.SBUS_ADDRESS) return process.env.SBUS_ADDRESS
  if (uid === 0) return '/run/sbus.socket'

  const quiet = { throwIfNoEntry: false }
  const runtime = process.env.XDG_RUNTIME_DIR ?? ''
  for (const directory of [runtime, `/run/user/${uid}`]) {
    const isAbsolute = directory.startsWith('/')
    if (isAbsolute && isOurs(fs.statSync(directory, quiet), 0o22)) {
      return `${directory}/sbus.socket`
    }
  }

  // Anybody could have made this one, and so it must be no link
  const directory = `/tmp/sbus-${uid}`
  if (isOurs(fs.lstatSync(directory, quiet), 0o77)) {
    return `${directory}/sbus.socket`
  }
  throw failure('ENOENT', 'no directory for a bus is yours alone')
}

// Return a struct sockaddr_un; NUL bytes fill up its name [ADDR-4].
function socketName (address) {
  const name = Buffer.alloc(2 + 108)
  name.writeUInt16LE(AF_UNIX)
  const isAbstract = address.startsWith(ABSTRACT)
  const bytes = isAbstract
    ? Buffer.from(address.slice(ABSTRACT.length), 'hex')
    : Buffer.from(address)
  const isNamed = bytes.length > 0 && isAbstract === (bytes[0] === 0)
  if (!isNamed || bytes.length > (isAbstract ? 108 : 107)) {
    throw failure('EINVAL', `${address} is no address`)
  }
  bytes.copy(name, 2)
  return name
}

class Sbus {
  #fd
  #buffer = Buffer.alloc(PACKET_MAX + 1) // what fills it was cut [CLIENT-5]
  #kept = [] // what came while nobody waited for it [CLIENT-8]
  #waiters = [] // who waits for which message; questions precede receive
  #isReading = false
  #isOver = false
  #writing = Promise.resolve() // the last packet that is sent
  #replyKeys = '' // the answers to all requests begin so
  #requests = 0

  constructor (fd) { this.#fd = fd }

  // Connect to an address, or to the default one.
  static async connect (address = defaultAddress()) {
    const name = socketName(address)
    const fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0)

    // The kernel doubles it, and so the largest packet fits [CLIENT-3]
    setsockopt(fd, SOL_SOCKET, SO_SNDBUF, [PACKET_MAX / 2 + 32], 4)
    if (connect(fd, name, name.length) < 0) {
      const code = koffi.errno()
      fs.closeSync(fd)
      throw failure(code, `no bus at ${address}: errno ${code}`)
    }
    return new Sbus(fd)
  }

  async close () {
    await this.#writing
    shutdown(this.#fd, 2) // which ends a read that waits
    while (await this.receive()); // up to the end
    fs.closeSync(this.#fd)
  }

  // ---- What is sent

  // Send a packet by one call, after those before it [CLIENT-3].  A thread
  // waits while the bus is busy.
  async #send (kind, key, ...rest) {
    const head = Buffer.from(kind + key, 'latin1')
    const packet = Buffer.concat([head, ...rest])
    if (key.includes('\0') || packet.length > PACKET_MAX) {
      throw failure('EMSGSIZE', 'a packet is too large, or its key has NUL')
    }
    const sent = this.#writing.then(() => write(this.#fd, packet))
    this.#writing = sent.catch(() => {})
    await sent.catch(error => {
      // What came before can still be received [CLIENT-6]
      const isOver = ['EPIPE', 'ECONNRESET'].includes(error.code)
      throw isOver ? failure('EPIPE', 'the bus has closed') : error
    })
  }

  subscribe (pattern) { return this.#send('SUB ', pattern) }
  unsubscribe (pattern) { return this.#send('UNSUB ', pattern) }

  publish (key, payload = '') {
    return this.#send('MSG ', key, Buffer.of(0), Buffer.from(payload))
  }

  // ---- What is received

  // Give the next packet of the socket as a message, or undefined at the end.
  async #read () {
    const buffer = this.#buffer
    let size
    while (size === undefined) {
      try {
        size = (await read(this.#fd, buffer, 0, buffer.length, null)).bytesRead
      } catch (error) {
        // A reset comes once, before the last packets [CLIENT-6]
        if (error.code !== 'ECONNRESET') throw error
      }
    }
    if (size === 0) return undefined
    if (size > PACKET_MAX) throw failure('EMSGSIZE', 'a packet was too large')
    const nul = buffer.indexOf(0)
    const isControl = buffer[0] === 'C'.charCodeAt()
    const key = buffer.latin1Slice(isControl ? 5 : 4, nul)
    const payload = Buffer.from(buffer.subarray(nul + 1, size)) // a copy
    return { isControl, key, payload }
  }

  // Whether a message answers a request, even one that nobody waits for.
  #isAnswer ({ key }) {
    return this.#replyKeys !== '' && key.startsWith(this.#replyKeys)
  }

  #hand (message) {
    const index = this.#waiters.findIndex(waiter => waiter.wants(message))
    if (index >= 0) this.#waiters.splice(index, 1)[0].resolve(message)
    else if (!this.#isAnswer(message)) this.#kept.push(message)
  }

  // Read while anybody waits, and no more: so the bus can hold publishers back
  // when this program is slow.
  async #serveWaiters () {
    if (this.#isReading) return
    this.#isReading = true
    try {
      while (this.#waiters.length > 0 && !this.#isOver) {
        const message = await this.#read()
        if (message) this.#hand(message)
        else this.#isOver = true
      }
      if (this.#isOver) this.#waiters.splice(0).forEach(one => one.resolve())
    } catch (error) {
      this.#waiters.splice(0).forEach(one => one.reject(error))
    } finally {
      this.#isReading = false
    }
  }

  // Give the next message that is wanted, or undefined at the end.
  #await (wants, ms) {
    let timer
    const outcome = new Promise((resolve, reject) => {
      const waiter = { wants, resolve, reject }
      if (ms === undefined) return this.#waiters.push(waiter)
      this.#waiters.unshift(waiter) // as receive is to leave it its answer
      timer = setTimeout(() => {
        this.#waiters = this.#waiters.filter(other => other !== waiter)
        reject(failure('ETIMEDOUT', 'nobody has answered in time'))
      }, ms)
    })
    this.#serveWaiters()
    return outcome.finally(() => clearTimeout(timer))
  }

  async #answer (wants, ms) {
    const message = await this.#await(wants, ms)
    if (!message) throw failure('EPIPE', 'the bus has closed')
    return message
  }

  // Give the next message, or undefined if the bus has closed.
  async receive () {
    const wants = message => !this.#isAnswer(message)
    return this.#kept.shift() ?? this.#await(wants)
  }

  async * [Symbol.asyncIterator] () {
    for (let message; (message = await this.receive());) yield message
  }

  // Give who this client is.  When the answer comes, the server has done all
  // that was sent before [PKT-5].
  async whoami (ms = 2 ** 31 - 1) {
    // If the bus has closed, what it sent before is still to be kept
    this.#send('CMSG ', WHOAMI).catch(() => {})
    const wants = ({ isControl, key }) => isControl && key === WHOAMI
    return String((await this.#answer(wants, ms)).payload)
  }

  // ---- Requests, of which the server knows nothing

  // Ask the clients that have subscribed to a key; give the first answer.
  async request (key, question = '', ms = 5000) {
    const end = performance.now() + ms
    if (this.#replyKeys === '') { // which nobody is to guess
      const secret = randomBytes(16).toString('hex')
      const keys = `${await this.whoami(ms)}/${secret}/`
      await this.subscribe(keys)
      this.#replyKeys = keys
    }

    const replyKey = `${this.#replyKeys}${++this.#requests}`
    const start = Buffer.from(`\0${replyKey}\0`)
    await this.#send('MSG ', key, start, Buffer.from(question))
    const wants = ({ key }) => [replyKey, `${replyKey}/failed`].includes(key)
    const answer = await this.#answer(wants, end - performance.now())
    if (answer.key === replyKey) return answer.payload
    throw failure('EFAILED', `${key} failed: ${answer.payload}`)
  }

  // Answer a message whose payload is a key for the answer, NUL, a question.
  async reply (asked, answer) {
    const found = REPLY_KEY.exec(asked.payload.toString('latin1', 0, 4000))
    if (found) return this.publish(found[0], answer)
    throw failure('EINVAL', 'the message is no request')
  }
}

module.exports = { Sbus }
