//! Order of servers and scrolling.

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum SortOrder {
    Load,
    #[default]
    Name,
    NewConnections,
}

impl SortOrder {
    pub fn name(self) -> &'static str {
        match self {
            Self::Load => "load",
            Self::Name => "name",
            Self::NewConnections => "new connections",
        }
    }
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct View {
    pub order: SortOrder,
    /// Number of servers that are scrolled off above the page.
    pub first_row: usize,
    /// Number of servers that fit on the page.
    pub page_size: usize,
}

impl View {
    /// Handles a key; `servers`: number of servers. Returns false on q, Esc and Ctrl-C.
    pub fn handle_key(&mut self, key: KeyEvent, servers: usize) -> bool {
        let page = self.page_size.max(1);
        match key.code {
            KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => return false,
            KeyCode::Char('q') | KeyCode::Esc => return false,
            KeyCode::Char('l') => self.order = SortOrder::Load,
            KeyCode::Char('n') => self.order = SortOrder::Name,
            KeyCode::Char('c') => self.order = SortOrder::NewConnections,
            KeyCode::Up => self.first_row = self.first_row.saturating_sub(1),
            KeyCode::Down => self.first_row += 1,
            KeyCode::PageUp => self.first_row = self.first_row.saturating_sub(page),
            KeyCode::PageDown => self.first_row += page,
            KeyCode::Home => self.first_row = 0,
            KeyCode::End => self.first_row = servers,
            _ => {}
        }
        self.first_row = self.first_row.min(servers.saturating_sub(page));
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_scroll_within_the_servers() {
        let mut view = View { page_size: 10, ..View::default() };
        let mut press = |code: KeyCode| {
            let goes_on = view.handle_key(code.into(), 25);
            (goes_on, view.order, view.first_row)
        };
        assert_eq!(press(KeyCode::Up), (true, SortOrder::Name, 0));
        assert_eq!(press(KeyCode::Down).2, 1);
        assert_eq!(press(KeyCode::PageDown).2, 11);
        assert_eq!(press(KeyCode::PageDown).2, 15, "the last page is full");
        assert_eq!(press(KeyCode::PageUp).2, 5);
        assert_eq!(press(KeyCode::End).2, 15);
        assert_eq!(press(KeyCode::Home).2, 0);
        assert_eq!(press(KeyCode::Char('c')), (true, SortOrder::NewConnections, 0));
        assert_eq!(press(KeyCode::Char('l')).1, SortOrder::Load);
        assert_eq!(press(KeyCode::Char('n')).1, SortOrder::Name);
        assert!(!press(KeyCode::Char('q')).0);
        assert!(!view.handle_key(KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL), 25));
    }
}
