"""How a request joins the queue, and how a pass over the queue grants tickets."""
