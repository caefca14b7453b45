// A doubly linked list through members of its elements: O(1) unlinking, no allocation. The list owns nothing.
#pragma once

namespace fusewire {

template <typename T>
struct ListLink {
  T* previous = nullptr;
  T* next = nullptr;
  bool linked = false;
};

template <typename T, ListLink<T> T::* Link>
class IntrusiveList {
 public:
  bool empty() const { return head_ == nullptr; }
  T* front() const { return head_; }
  static T* next(const T* element) { return (element->*Link).next; }
  static bool linked(const T* element) { return (element->*Link).linked; }

  void push_back(T* element) {
    ListLink<T>& link = element->*Link;
    link = {tail_, nullptr, true};
    (tail_ != nullptr ? (tail_->*Link).next : head_) = element;
    tail_ = element;
  }

  void erase(T* element) {
    ListLink<T>& link = element->*Link;
    (link.previous != nullptr ? (link.previous->*Link).next : head_) = link.next;
    (link.next != nullptr ? (link.next->*Link).previous : tail_) = link.previous;
    link = {};
  }

 private:
  T* head_ = nullptr;
  T* tail_ = nullptr;
};

}  // namespace fusewire
