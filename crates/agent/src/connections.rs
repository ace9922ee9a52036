//! Number of open TCP connections in this network namespace.

use std::fs;

// Not /proc/self, which shows the namespace of the process's first thread.
const SOCKSTAT: &str = "/proc/thread-self/net/sockstat";
/// File with the counts of IPv6 sockets, including IPv4-mapped addresses. It is missing if the kernel has no IPv6.
const SOCKSTAT_IPV6: &str = "/proc/thread-self/net/sockstat6";

/// Returns the kernel's count of established connections and listening sockets, or 0 if it is unknown. The count only
/// divides the load by connections, so a few listening sockets do not matter.
pub fn open_connection_count() -> u32 {
    let count = |path| fs::read_to_string(path).ok().and_then(|text| parse(&text)).unwrap_or(0);
    count(SOCKSTAT) + count(SOCKSTAT_IPV6)
}

fn parse(sockstat: &str) -> Option<u32> {
    let in_use = |line: &str| {
        let rest = line.strip_prefix("TCP: inuse ").or_else(|| line.strip_prefix("TCP6: inuse "))?;
        rest.split(' ').next()?.parse().ok()
    };
    sockstat.lines().find_map(in_use)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn address_in_use_is_found() {
        let text = "sockets: used 23\nTCP: inuse 17 orphan 1 tw 300 alloc 20 mem 3\nUDP: inuse 0 mem 0\n";
        assert_eq!(parse(text), Some(17));
        assert_eq!(parse("TCP6: inuse 5\nUDP6: inuse 1\n"), Some(5));
        assert_eq!(parse(""), None);
    }

    #[test]
    fn sockets_of_ipv6_count() {
        // More IPv6 sockets than the test has IPv4 sockets.
        let listeners: Vec<_> = (0..500).map(|_| std::net::TcpListener::bind("[::]:0").unwrap()).collect();
        assert!(open_connection_count() >= listeners.len() as u32);
    }

    #[test]
    fn sockstat_exists() {
        assert!(std::path::Path::new(SOCKSTAT).exists());
    }
}
