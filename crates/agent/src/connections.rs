//! Counts the open TCP connections in this network namespace.

use std::fs;

// /proc/self would show the network namespace of the process's first thread, which may differ from this thread's.
const SOCKSTAT_PATH: &str = "/proc/thread-self/net/sockstat";
/// File with the kernel's count of IPv6 sockets, including those with IPv4-mapped addresses. It is missing if the
/// kernel has no IPv6.
const SOCKSTAT_IPV6_PATH: &str = "/proc/thread-self/net/sockstat6";

/// Returns this machine's number of established TCP connections and listening sockets, or 0 if it is unknown. The
/// controller derives a connection's mean load from it, so a few listening sockets do not matter.
pub fn open_tcp_connection_count() -> u32 {
    let count_in_file = |path| fs::read_to_string(path).ok().and_then(|text| parse_tcp_in_use(&text)).unwrap_or(0);
    count_in_file(SOCKSTAT_PATH) + count_in_file(SOCKSTAT_IPV6_PATH)
}

fn parse_tcp_in_use(sockstat: &str) -> Option<u32> {
    let in_use_count = |line: &str| {
        let text_after_label = line.strip_prefix("TCP: inuse ").or_else(|| line.strip_prefix("TCP6: inuse "))?;
        text_after_label.split(' ').next()?.parse().ok()
    };
    sockstat.lines().find_map(in_use_count)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tcp_sockets_in_use_are_parsed_from_sockstat() {
        let text = "sockets: used 23\nTCP: inuse 17 orphan 1 tw 300 alloc 20 mem 3\nUDP: inuse 0 mem 0\n";
        assert_eq!(parse_tcp_in_use(text), Some(17));
        assert_eq!(parse_tcp_in_use("TCP6: inuse 5\nUDP6: inuse 1\n"), Some(5));
        assert_eq!(parse_tcp_in_use(""), None);
    }

    #[test]
    fn ipv6_sockets_are_counted() {
        // The number exceeds the IPv4 sockets that the test process has, so only IPv6 sockets can account for it.
        let listeners: Vec<_> = (0..500).map(|_| std::net::TcpListener::bind("[::]:0").unwrap()).collect();
        assert!(open_tcp_connection_count() >= listeners.len() as u32);
    }

    #[test]
    fn sockstat_file_exists() {
        assert!(std::path::Path::new(SOCKSTAT_PATH).exists());
    }
}
