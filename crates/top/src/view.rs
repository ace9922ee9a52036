//! Order in which servers are shown, and scrolling.

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum ServerSortOrder {
    Load,
    #[default]
    Name,
    NewConnections,
}

impl ServerSortOrder {
    pub fn name(self) -> &'static str {
        match self {
            Self::Load => "load",
            Self::Name => "name",
            Self::NewConnections => "new connections",
        }
    }
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ServerListView {
    pub sort_order: ServerSortOrder,
    /// Number of servers in the list above the first visible one.
    pub first_visible_row: usize,
    /// Number of servers that fit on the page.
    pub visible_row_count: usize,
}

impl ServerListView {
    /// Handles a key press. `servers` is the number of listed servers. Returns false if the key ends the program (q,
    /// Esc or Ctrl-C).
    pub fn handle_key(&mut self, key: KeyEvent, servers: usize) -> bool {
        let page_size = self.visible_row_count.max(1);
        match key.code {
            KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => return false,
            KeyCode::Char('q') | KeyCode::Esc => return false,
            KeyCode::Char('l') => self.sort_order = ServerSortOrder::Load,
            KeyCode::Char('n') => self.sort_order = ServerSortOrder::Name,
            KeyCode::Char('c') => self.sort_order = ServerSortOrder::NewConnections,
            KeyCode::Up => self.first_visible_row = self.first_visible_row.saturating_sub(1),
            KeyCode::Down => self.first_visible_row += 1,
            KeyCode::PageUp => self.first_visible_row = self.first_visible_row.saturating_sub(page_size),
            KeyCode::PageDown => self.first_visible_row += page_size,
            KeyCode::Home => self.first_visible_row = 0,
            KeyCode::End => self.first_visible_row = servers,
            _ => {}
        }
        self.first_visible_row = self.first_visible_row.min(servers.saturating_sub(page_size));
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_scroll_only_within_the_list_of_servers() {
        let mut view = ServerListView { visible_row_count: 10, ..ServerListView::default() };
        let mut press_key = |code: KeyCode| {
            let is_still_running = view.handle_key(code.into(), 25);
            (is_still_running, view.sort_order, view.first_visible_row)
        };
        assert_eq!(press_key(KeyCode::Up), (true, ServerSortOrder::Name, 0));
        assert_eq!(press_key(KeyCode::Down).2, 1);
        assert_eq!(press_key(KeyCode::PageDown).2, 11);
        assert_eq!(press_key(KeyCode::PageDown).2, 15, "the last page is full");
        assert_eq!(press_key(KeyCode::PageUp).2, 5);
        assert_eq!(press_key(KeyCode::End).2, 15);
        assert_eq!(press_key(KeyCode::Home).2, 0);
        assert_eq!(press_key(KeyCode::Char('c')), (true, ServerSortOrder::NewConnections, 0));
        assert_eq!(press_key(KeyCode::Char('l')).1, ServerSortOrder::Load);
        assert_eq!(press_key(KeyCode::Char('n')).1, ServerSortOrder::Name);
        assert!(!press_key(KeyCode::Char('q')).0);
        assert!(!view.handle_key(KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL), 25));
    }
}
