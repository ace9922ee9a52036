//! Number of open TCP connections in this network namespace.

use std::fs;

// Not /proc/self: that is the namespace of the process's first thread.
const SOCKSTAT: &str = "/proc/thread-self/net/sockstat";

/// Returns the kernel's count of established connections and listening sockets; 0: unknown. It only divides the load by
/// connections, so a few listening sockets do not matter.
pub fn open() -> u32 {
    fs::read_to_string(SOCKSTAT).ok().and_then(|text| parse(&text)).unwrap_or(0)
}

fn parse(sockstat: &str) -> Option<u32> {
    let line = sockstat.lines().find_map(|line| line.strip_prefix("TCP: inuse "))?;
    line.split(' ').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_in_use_is_taken() {
        let text = "sockets: used 23\nTCP: inuse 17 orphan 1 tw 300 alloc 20 mem 3\nUDP: inuse 0 mem 0\n";
        assert_eq!(parse(text), Some(17));
        assert_eq!(parse(""), None);
    }

    #[test]
    fn sockstat_exists() {
        assert!(std::path::Path::new(SOCKSTAT).exists());
    }
}
