"""Scripts that two emulated nodes run to see what becomes of packets; rank 0 sends."""

import sys

PING = """
import os, socket, struct, time

def checksum(data):
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    total = (total & 0xFFFF) + (total >> 16)
    return ~(total + (total >> 16)) & 0xFFFF

if os.environ["RANK"] == "0":
    with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP) as door:
        door.settimeout(20)
        for number in range(20):
            head, body = struct.pack("!BBHHH", 8, 0, 0, 7, number), bytes(56)
            asked = time.perf_counter()
            door.sendto(struct.pack("!BBHHH", 8, 0, checksum(head + body), 7, number) + body, ("10.77.0.2", 0))
            while door.recv(2000)[20] != 0:
                pass
            print(time.perf_counter() - asked)
"""

NUMBERED = """
import os, socket, struct, sys, time
packets = int(sys.argv[1])
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as door:
    if os.environ["RANK"] == "0":
        for _ in range(4):  # has the addresses known, though one of the questions may be lost
            door.sendto(bytes(8), ("10.77.0.2", 5001))
            time.sleep(0.5)
        for number in range(packets):
            door.sendto(struct.pack("I", number) + bytes(200), ("10.77.0.2", 5000))
            if number % 20 == 0:
                time.sleep(0.001)
        time.sleep(1)
        for _ in range(50):
            door.sendto(b"", ("10.77.0.2", 5000))
            time.sleep(0.02)
    else:
        door.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
        door.bind(("", 5000))
        numbers = []
        while data := door.recv(1000):
            numbers.append(struct.unpack_from("I", data)[0])
        print(*numbers)
"""


def python(script: str, *words: object) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", script, *map(str, words)]
