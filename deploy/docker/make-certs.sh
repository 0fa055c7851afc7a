#!/bin/sh
# Makes the certificates of the demo with openssl: a CA, the broker, the gateway (backend), and one for each named client.
#
#     ./make-certs.sh [--out FOLDER] [NAME ...]        default: ./certs, and a vehicle1
#
# A name is an authority: the broker uses the certificate's common name. Existing files are kept, so a second run adds clients to a
# fleet. The CA key of a real fleet belongs on an offline machine; here it lies beside the others.
set -eu
out=$(dirname "$0")/certs
if [ "${1:-}" = --out ]; then out=$2; shift 2; fi
[ $# -gt 0 ] || set -- vehicle1
for name in "$@"; do
    case $name in '' | *[!a-z0-9.-]* | ca | broker | backend) echo "make-certs.sh: '$name' can't be a client's name" >&2; exit 1 ;; esac
done
umask 077
mkdir -p "$out"
chmod 755 "$out" # each key in it is readable only by its owner
cd "$out"

new_key() { openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out "$1" 2>/dev/null; }

if [ ! -e ca.key ]; then
    new_key ca.key
    openssl req -x509 -new -key ca.key -sha256 -days 3650 -subj "/CN=up-streamer demo CA" \
        -addext "basicConstraints=critical,CA:TRUE,pathlen:0" -addext "keyUsage=critical,keyCertSign,cRLSign" -out ca.crt
fi

# issue NAME OTHER_NAMES: a certificate for TLS, as server and as client, for two years
issue() {
    [ ! -e "$1.crt" ] || return 0
    new_key "$1.key"
    openssl req -new -key "$1.key" -subj "/CN=$1" -out "$1.csr"
    printf '%s\n' "basicConstraints=critical,CA:FALSE" "keyUsage=critical,digitalSignature" "extendedKeyUsage=serverAuth,clientAuth" \
        "subjectAltName=$2" > "$1.ext"
    openssl x509 -req -sha256 -days 730 -in "$1.csr" -CA ca.crt -CAkey ca.key -CAcreateserial -extfile "$1.ext" -out "$1.crt" 2>/dev/null
    rm "$1.csr" "$1.ext"
}

issue broker "DNS:broker,DNS:localhost,IP:127.0.0.1"
issue backend "DNS:backend,DNS:gateway,DNS:localhost,IP:127.0.0.1"
for name in "$@"; do issue "$name" "DNS:$name"; done
chmod 644 ./*.crt

# The users in the images of mosquitto and of the gateway (Dockerfile)
if [ "$(id -u)" = 0 ]; then
    chown 1883 broker.key
    chown 10001 backend.key
else
    echo "make-certs.sh: not run as root, so say once: sudo chown 1883 $PWD/broker.key; sudo chown 10001 $PWD/backend.key" >&2
fi
